"""The programs that workers run, such as dist-train, and the torchrun that starts the workers."""

import gc
import sys

# An import of torch creates many objects, and all of them stay alive. The garbage collector would examine
# them again and again, which takes a tenth of the start-up time, and a quarter with torch._dynamo. So it is
# switched off until `ranks.run_worker`, but only for programs of this package. While Python searches for the
# module to run, sys.argv[0] is "-m".
if sys.argv[0] == "-m" and any(argument.startswith(f"{__name__}.") for argument in sys.orig_argv):
    gc.disable()
