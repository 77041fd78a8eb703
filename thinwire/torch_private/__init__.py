"""The only room that uses private names of torch, and that knows which versions of torch have them.

Torch shows some of what the adapters need in no public name, and such names change between its minor versions. Each
module here is for one adapter. When it is imported it looks for the names it uses; where one is missing, the import is
refused in one line that names the versions that work (versions.py).
"""
