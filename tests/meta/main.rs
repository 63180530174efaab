//! Tests of the source tree itself: layers, words, shape of the code, generated header, README.

mod adding;
#[path = "../support/c_library.rs"]
mod c_library;
mod deployment;
mod header;
mod kernel_includes;
mod layers;
mod promises;
mod public_api;
mod readme;
mod shape;
mod source;
mod words;
