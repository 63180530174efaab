//! # Numbers: what is promised
//!
//! **Raw.** Integers wrap and are exact otherwise. Floats of up to 32 bits accumulate in fp32, f64
//! in f64. A partial sum that travels does so in the data type, so a sum over N ranks of a type
//! with unit roundoff u lies within about (N-1) u of the exact one, relative to the sum of the
//! magnitudes. An average divides once, after accumulation. Largest and smallest are NaN if any
//! contribution is.
//!
//! **One encode.** For a finite x in a block with largest magnitude A:
//!
//! | codec | largest error of one encode and decode |
//! | --- | --- |
//! | `linear8` | A / 254 |
//! | `dynamic8` | 0.0086 A, and relative 5 % in the first decade below A, 9 % in the second |
//! | `static8` | 22 % of x, within its fixed range |
//! | `mantissa8` | a third of x, within its fixed range |
//! | `cast_bf16` | x / 256 |
//! | `cast16` | x / 2048, within its range |
//! | `minmax1`, `2`, `4`, `8` | half of (max - min) / (2^b - 1) of the block; with a seed, all of it |
//! | `fp8_e4m3`, `fp8_e5m2` | x / 16 and x / 8; below A / 28,672 and A / 9.4e8: A / 458,752 and A / 7.5e9 |
//! | `trunc24`, `trunc16`, `trunc8` | x / 32768, x / 128, 3/4 x, always towards zero; below 2^-125 `trunc8` keeps nothing |
//! | `terngrad` | A; unbiased for what is within 2.5 deviations |
//! | `onebit` | A; the sums of a block's elements of each sign are kept |
//! | `threshold2` | all of x below the threshold; what is beyond saturates |
//!
//! plus one rounding of fp32. Below the normal numbers of its format (`cast16`: below 2^-14) the error
//! of a cast is half of the smallest step instead, that of a truncation the whole of it. Blocks are 256
//! elements unless the spec says otherwise. Encode is true nearest; it is therefore not unbiased for a
//! single value. `trunc16` shrinks Gaussian data by 0.28 % on average, `trunc8` by 48 %. `onebit` and
//! `threshold2` are meant for callers that feed their error back.
//!
//! **By chance.** With `seed=S` the `minmax` codecs round up with the probability of the fraction,
//! and `terngrad` always draws. A draw hangs on the seed, the number of the call on its
//! communicator, the rank and whether it encodes its contribution or a sum, and the element's
//! place in the message ([`crate::codec::Random`]): on nothing else, so that runs repeat on any
//! transport and instruction set. Two calls draw different numbers.
//!
//! **A collective.** The error is at most the sum, over the encodes that an element's
//! contributions pass, of the error above with A of that partial sum. For independent inputs and
//! a relative RMS error e of one encode, the result has
//!
//! | algorithm | encodes of a partial sum | relative RMS error |
//! | --- | --- | --- |
//! | `ring` | one a hop | e sqrt((N+1)/2) |
//! | `tree` | one a level | e sqrt(log2(N) + 1/N), N a power of two |
//! | `direct` | contributions but the owner's, and the sum once | e sqrt(2 - 1/N) |
//! | `oneshot` | contributions only | e |
//! | `hierarchical` | contributions inside a host, sums of hosts on their way, the sum once | as that algorithm over H hosts, and one encode more |
//!
//! Of `CINCH_CODEC=intra=A,inter=B`, A encodes contributions on their way inside a host, B all that
//! goes between hosts; on its last way inside a host that stays as it is. With A raw, the error is
//! that of B over H hosts. Flat algorithms on several hosts use B alone, one host A alone.
//!
//! So codec and algorithm are independent in code and not in quality: a lossy codec on a ring of
//! many ranks is the worst choice.
//!
//! **Not finite.** A NaN or infinity reaches every rank as something that is not finite: with
//! codecs that have blocks the whole block decodes to NaN, with the others that element. It is
//! counted in the report of the rank that had it. A finite value beyond a fixed range, or beyond
//! the scale kept by `tensor=K`, saturates and is counted too. Reports of
//! calls on GPUs count neither.
//!
//! **Small.** Subnormals are ordinary inputs. No absolute epsilon is added anywhere. -0 stays -0
//! in casts and truncations and decodes to +0 elsewhere; a block of zeros decodes to zeros. Among
//! other numbers `minmax` and `onebit` treat a zero like any of them.
//!
//! **The same bits.** After all_reduce, all_gather and broadcast all ranks hold the same bits:
//! encoded bytes are forwarded unchanged, and who encodes decodes its own encoding. Repeated runs
//! with the same ranks, settings, codec and algorithm give the same bits: contributions are added
//! in a fixed order, never in order of arrival. The instruction set and the transport do not
//! matter, nor does what a program has set for the arithmetic of its threads, as
//! `torch.set_flush_denormal(True)` and libraries linked with `-ffast-math` do: a call computes by
//! IEEE 754's defaults and leaves the thread as it was. Another number of ranks, another algorithm or
//! another cut may give other last bits. All follow from ranks and settings but where costs are
//! measured (`auto:`): a communicator that is made anew measures other numbers, by which it may choose
//! another codec, algorithm or number of chunks. `CINCH_CODEC` without `auto:` repeats.
//!
//! **Error feedback.** With `Call::feedback`, v = x + r is encoded in the place of every x, and
//! r = v - dec(enc(v)) waits for the next call of that tensor: on each rank one residual for each
//! chunk that it contributes to or passes on, one for each that it owns. The sum over many calls is
//! then off by what waits at the end, however many calls there were. Residuals stay where they are
//! for elements that are not finite, change only when a call succeeds, and are zero again when the
//! count, the cut, the operator or the type changes; a new communicator has none. Where imported ones
//! go that way, as measured costs (`auto:`) cut otherwise than before, a line of the log says so. They cost
//! two fp32 numbers an element and one more decode an encode. On a GPU they lie in its memory element
//! by element, the kernel turns the two over, and replays of a graph go on from each other. An average divides before the owner
//! encodes, a pre-multiplied sum multiplies before the worker does; residuals are in those units.
//!
//! **Never silent.** Lossy codecs meet only floating types under sum, average and pre-multiplied
//! sum. Asked for by a call, anything else is an error; as a default, it stays out. Left to
//! the model (`auto:`), it runs on all ranks or on none. The report says which codec ran.
