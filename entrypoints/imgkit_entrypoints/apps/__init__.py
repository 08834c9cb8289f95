"""What the workers run."""

import gc
import sys

# The objects that an import of torch makes all stay. Looking through them again and again takes a tenth of
# the start, and with torch._dynamo a quarter. So the garbage collector rests until `ranks.run_worker`. Python
# keeps "-m" here while it looks for the program's module. A user's own program keeps its collector.
if sys.argv[0] == "-m" and any(argument.startswith(f"{__name__}.") for argument in sys.orig_argv):
    gc.disable()
