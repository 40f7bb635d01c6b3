"""Tools that look at machines, jobs and runs: they measure, predict, judge and teach. No engine module imports them."""
