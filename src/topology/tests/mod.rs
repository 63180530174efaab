//! Tests of the whole topology: machines with published predictions.

mod machines;
mod predictions;
mod xml_input;
