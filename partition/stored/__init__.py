"""Bring values to the forms in which they wait for the backward, and back.

A form makes arrays of an array, and gives back an array of its shape and dtype: a smaller dtype with or without scales,
or two functions of a user's. A new form is a line in `FORMS` of `forms`.

Files, in reading order:

    forms: Say in which forms an array may wait for the backward: smaller ones, which are not exact.
    packing: Write the equations that bring a value to another form, and back.
"""
