"""The sentences that tests expect of `mpitrain/data`."""

HOLDS_TOKEN_SO_DATA = "holds token 700, so data\\.vocabulary must be at least 701, but is 700\\."
LEAST = "at least 256, but is 255"
NEEDS_DOCUMENTS = "attend=document needs documents(.|\\n)*data.packing=true"
ATTEND_IS_OF = r"data\.attend is of data\.source"
NEEDS_ATTENTION = "needs the layer"
