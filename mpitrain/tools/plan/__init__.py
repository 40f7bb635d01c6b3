"""Previews: charts of pipelines, steps of collectives, the best number of micro-batches."""
