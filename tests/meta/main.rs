//! Checks of the tree itself: layers, words, the generated header, the README.

mod header;
mod layers;
mod readme;
