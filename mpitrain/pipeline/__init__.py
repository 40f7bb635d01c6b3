"""Pipeline parallelism: schedules as data, a simulator that checks them, and the runtime."""
