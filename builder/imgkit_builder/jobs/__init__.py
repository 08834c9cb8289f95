"""Turn a recipe and a user's request into a job script, and submit it to the recipe's scheduler.

``request`` contains the user's flags. ``resolve`` checks them against the recipe's system, and returns a
``Job``. ``systems`` turns the job into a ``Script``, which is the text of the job and the command that
submits it. ``submit`` brings the image, the data and the code to the machine that submits the job, and runs
this command there.
"""
