"""From a recipe and a request to the text that is submitted, and to the words that submit it.

``request`` is what the user asks for, ``resolve`` holds it against the recipe's system and gives a ``Job``,
``systems`` turns that into a ``Script``, ``submit`` hands the script over. Only the last has an effect.
"""
