"""All that the package uses of PyTorch's private names, and what takes the place of one that a version does not have.

The rest of the package relies on the public interface of torch 2.4 and newer. Names of modules are looked up once, when a
module of this folder is imported, so that it costs a hook nothing; attributes of objects are looked up where they are used. A
missing one never raises: `lost.LOST` says what the exporter then does without, and `lost.warn` logs that once. A name that is not
in `LOST` has a public substitute, which is slower and loses nothing.

The folder lies in the root of the package because rooms above and below `capture` need it.
"""
