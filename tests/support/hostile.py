"""Values that no option means."""

HOSTILE = (
    *("", " ", "1e-320", "nan", "-inf", "1e308", "99999999999999999999"),
    "9" * 400,
    "9" * 5000,
    *("true", "null", "{}", "[", "é", "a b", "\u202e", "/", "/dev/null", "..", "~nosuch", "%s%n"),
    "x" * 5000,
    "\udcff",
    "a=b",
)
