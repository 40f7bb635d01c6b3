"""One name per op, several bodies: reference.py is the meaning, host.py the tuned CPU body."""
