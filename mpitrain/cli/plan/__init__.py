"""`mpitrain plan`: predictions about pipelines, collectives and jobs, counted or measured."""
