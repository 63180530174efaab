//! Element arithmetic: widening, combining, finishing and rounding, for every type and operator.
