"""`import mpitrain.learn` gives the module that `mpitrain.learn` is."""

import sys

from mpitrain.tools.textbook import learn

sys.modules[__name__] = learn
