"""Jobs: a recipe and a user's request become the text that is submitted, and the words that submit it.

``request`` holds the user's flags. ``resolve`` checks them against the recipe's system and returns a ``Job``,
``systems`` turns the job into a ``Script``, and ``submit`` submits it. Only ``submit`` has an effect.
"""
