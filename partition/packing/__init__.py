"""Bring values to the forms in which they wait for the backward, and back.

A form turns an array into other arrays, and these into an array of its shape and dtype. It is a smaller dtype with or
without scales, or a user's two functions. A new form is a line in `FORMS` of `forms`.

Files, in reading order:

    forms: Say in which forms an array may wait for the backward: smaller ones, which are not exact.
    packing: Write the equations that bring a value to another form, and back.
"""
