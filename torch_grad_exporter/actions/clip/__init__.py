"""Clipping gradients by a policy: the policies, `Clipper` for the user's own loop, and `ClipAtSteps` for `clip=`."""
