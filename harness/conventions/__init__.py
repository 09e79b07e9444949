"""What an implementation means where attention leaves it open, found by asking it: ``attncheck conventions``.

``questions.py`` has what is asked, ``measure.py`` asks it and finds the answer among what it may mean.
"""

from attncheck.conventions.measure import Measured, ask_all
from attncheck.conventions.questions import QUESTIONS, Question

__all__ = ["QUESTIONS", "Measured", "Question", "ask_all"]
