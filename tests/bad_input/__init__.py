"""Calls that must be refused: a table for each folder of the package, in a module of the folder's name.

Each module has `BAD`: in a few words what is bad → (the call, the error, a part of its message). The call is a function
without arguments. The error is a ValueError or a TypeError. The part of the message, a regular expression, has the
argument, the rule and, if it fits, the value. `tests/test_bad_input.py` makes all calls and finds new modules itself.
"""
