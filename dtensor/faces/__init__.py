"""Module names from before the packages, each the module itself: `dtensor.registry` is `dtensor.rules.registry`.

`dtensor` looks here for modules that it does not have. Remove a file to end support for the name.
"""
