"""``dist-bench report``: saved runs as a page, a drawing or text. Uses only ``record``.

From the top down: ``command``, then ``page``, then ``content``, then ``chart`` and ``reference``.
"""
