"""What each rank notes of its messages and of what it computes, in a file that outlives the rank."""
