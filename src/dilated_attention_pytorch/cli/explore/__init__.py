"""`dilated-attention explore`: a page on this machine where a pattern is picked and seen.

`question.py` says what the page may ask, `answer.py` what it is told, `samples.py` makes the activations that blocks
are chosen from, `server.py` serves; `page/` is the page. Every number is the library's.
"""

from .server import Server, run

__all__ = ["Server", "run"]
