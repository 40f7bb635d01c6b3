"""Lets `import mpitrain.learn` find the module that `mpitrain.learn` already names as an attribute."""

import sys

from mpitrain.tools.textbook import learn

sys.modules[__name__] = learn
