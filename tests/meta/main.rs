//! Checks of the tree itself: layers, words, shape, the generated header, the README.

mod header;
mod layers;
mod readme;
mod shape;
mod source;
mod words;
