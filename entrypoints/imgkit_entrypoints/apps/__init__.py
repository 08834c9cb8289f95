"""The programs that the workers of a launch run, such as dist-train, and torchrun, which starts them."""

import gc
import sys

# All objects that an import of torch makes stay alive. The garbage collector would look through them again
# and again, which takes a tenth of the start, and with torch._dynamo a quarter. So it is off until
# `ranks.run_worker`. Python keeps "-m" in sys.argv[0] while it looks for the module of the program. A user's
# own program keeps its garbage collector.
if sys.argv[0] == "-m" and any(argument.startswith(f"{__name__}.") for argument in sys.orig_argv):
    gc.disable()
