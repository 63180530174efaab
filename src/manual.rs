//! The pages of `docs/`, which `scripts/docs` also builds as a book.

/// Declares one empty module for each page; its documentation is the page.
macro_rules! pages {
    ($($name:ident = $file:literal),* $(,)?) => {$(
        #[doc = include_str!(concat!("../docs/", $file))]
        pub mod $name {}
    )*};
}

pages! {
    codec_rules = "codec-rules.md",
    failures = "failures.md",
    nccl = "nccl.md",
    format = "format.md",
    numerics = "numerics.md",
    topology = "topology.md",
    tuning = "tuning.md",
}

// The pages for those who change the library link to its modules.
#[cfg(feature = "internal")]
pages! {
    adding = "adding.md",
    dependencies = "dependencies.md",
    layers = "layers.md",
    memory_ordering = "memory-ordering.md",
    one_allreduce = "one-allreduce.md",
}

/// Compiles the Rust of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
