//! Checks of the tree itself: layers, words, shape, the generated header, the README.

mod adding;
#[path = "../support/c_library.rs"]
mod c_library;
mod header;
mod kernel_includes;
mod layers;
mod public_api;
mod readme;
mod shape;
mod source;
mod words;
