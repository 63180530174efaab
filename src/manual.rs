//! The pages of `docs/`, which `scripts/docs` also builds as a book.

/// Declares one empty module for each page; its documentation is the page.
macro_rules! pages {
    ($($name:ident = $file:literal),* $(,)?) => {$(
        #[doc = include_str!(concat!("../docs/", $file))]
        pub mod $name {}
    )*};
}

pages! {
    adding = "adding.md",
    codec_rules = "codec-rules.md",
    dependencies = "dependencies.md",
    failures = "failures.md",
    layers = "layers.md",
    memory_ordering = "memory-ordering.md",
    nccl = "nccl.md",
    numerics = "numerics.md",
    one_allreduce = "one-allreduce.md",
    tuning = "tuning.md",
}

/// Compiles the Rust of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
