"""Reports made from results directories: pandas frames, and what writes them for people and programs.

``frames`` is where every report starts. To add a report, write a module that takes ``Frames`` and add it to ``write``.
"""
