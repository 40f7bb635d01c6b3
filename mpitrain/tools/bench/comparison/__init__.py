"""One job under several modes, layouts, schedules, precisions and tricks, measured in turns."""
