"""The sentences that tests expect of `mpitrain/layers`."""

HEADS_DO_DIVIDE_WIDTH = "5 heads do not divide a width of 12\\.(.|\\n)*Nearest that does: 4"
