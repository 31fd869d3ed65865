// A library with the name that others are to need; nothing in it is used.
