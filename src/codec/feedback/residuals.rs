//! Residuals of one tensor: the errors of lossy encodes, chunk by chunk, which the next call adds to its
//! input.
//!
//! For every chunk that a rank encodes, it encodes v = x + r instead of the input x, where r is the residual.
//! The new residual is v - dec(enc(v)). A call reads the residuals that the previous call committed; its own
//! become visible with [`Residuals::commit`]. So a chunk that is encoded twice in a call, for more peers than
//! one step serves, has equal bytes both times. A call that fails changes no residual. This costs a second
//! copy of the residuals.

use crate::error::{Error, Result};

/// The purpose of an encode. A rank may encode a chunk once as a contribution or a partial sum, and
/// once more as the owner of the finished sum. Each purpose has its own residual.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Encodes this rank's contribution, or the partial sum that it passes on.
    Worker = 0,
    /// Encodes the finished sum.
    Owner = 1,
}

/// Flag in [`Shape::kind`] for residuals that are stored element by element, as GPUs do, and not in
/// chunks.
pub const BY_ELEMENT: u64 = 1 << 63;

/// Properties that must be equal between calls that share residuals. With another division into chunks, or
/// another kind of sum, a residual would be added to the wrong element.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Collective, operator, data type, root, codecs and algorithm, packed into one number.
    pub kind: u64,
    /// Number of elements of the message, or of one rank's block.
    pub count: u64,
    /// Number of elements of a full chunk.
    pub chunk: u64,
    /// Number of chunks, over all passes.
    pub chunks: u64,
}

/// The residuals of one tensor on one rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Residuals {
    shape: Shape,
    /// The chunks that this rank encodes, by ascending [`slot_number`]. A missing or empty slot stands for zeros.
    slots: Vec<(usize, Slot)>,
    /// Whether the residuals were imported and no call has used them. Set by [`Residuals::put`] and
    /// cleared by the first call.
    restored: bool,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Slot {
    now: Vec<f32>,
    next: Vec<f32>,
    written: bool,
    /// Sums of the squares of `now` and `next`.
    squares: f64,
    next_squares: f64,
}

impl Residuals {
    /// Creates a tensor without residuals.
    pub fn new() -> Residuals {
        Residuals::default()
    }

    /// Starts a call of `shape`. If the previous call had another shape, all residuals become zero.
    pub fn begin(&mut self, shape: Shape) {
        if self.shape != shape {
            self.shape = shape;
            self.slots.clear();
        }
        self.restored = false;
        for (_, slot) in &mut self.slots {
            slot.written = false;
        }
    }

    /// Returns whether a call of `shape` would drop imported residuals, because they have another
    /// shape.
    pub fn are_lost_to(&self, shape: Shape) -> bool {
        self.restored && self.shape != shape
    }

    /// Returns whether the residuals were imported and no call has used them yet.
    pub fn is_restored(&self) -> bool {
        self.restored
    }

    /// Marks imported residuals as used by a call.
    pub fn mark_used(&mut self) {
        self.restored = false;
    }

    /// Adds the residual of `chunk`, from element `at` of the chunk on, to `values`. A residual that would
    /// make a finite value infinite is skipped. A missing residual is +0 and so turns -0 into +0, as it does
    /// in a second encode of the chunk by the same call, and on GPUs.
    pub fn add(&self, role: Role, chunk: usize, at: usize, values: &mut [f32]) {
        let slot = self.find(slot_number(role, chunk)).ok();
        let now = slot.and_then(|slot| self.slots[slot].1.now.get(at..at + values.len()));
        let Some(now) = now else {
            for value in values {
                if *value == 0.0 {
                    *value = 0.0;
                }
            }
            return;
        };
        for (value, residual) in values.iter_mut().zip(now) {
            let sum = *value + residual;
            if sum.is_finite() {
                *value = sum;
            }
        }
    }

    /// Keeps `values - decoded`, the error of an encode, as the new residual. `values` are the
    /// elements from `at` on of `chunk`, which has `elements` elements. An encode keeps a chunk from its first
    /// element on. Where the difference is not
    /// finite the old residual stays, so that a NaN in a block neither spoils nor erases residuals.
    ///
    /// # Panics
    /// If the values reach beyond the end of the chunk.
    pub fn keep(
        &mut self,
        role: Role,
        (chunk, elements): (usize, usize),
        at: usize,
        values: &[f32],
        decoded: &[f32],
    ) {
        let slot = self.slot(role, chunk);
        if slot.now.len() != elements {
            slot.now.clear();
            slot.now.resize(elements, 0.0);
        }
        slot.next.resize(elements, 0.0);
        slot.written = true;
        let range = at..at + values.len();
        let kept = slot.next[range.clone()]
            .iter_mut()
            .zip(&slot.now[range.clone()]);
        for ((next, now), (value, decoded)) in kept.zip(values.iter().zip(decoded)) {
            let dropped = value - decoded;
            *next = if dropped.is_finite() { dropped } else { *now };
        }
        if at == 0 {
            slot.next_squares = 0.0;
        }
        slot.next_squares += sum_squares(&slot.next[range]);
    }

    /// Ends a call that succeeded: the next call adds the residuals that this call kept.
    pub fn commit(&mut self) {
        for (_, slot) in &mut self.slots {
            if std::mem::take(&mut slot.written) {
                std::mem::swap(&mut slot.now, &mut slot.next);
                slot.squares = slot.next_squares;
            }
        }
    }

    /// Multiplies all residuals by `factor`; a residual that overflows becomes 0.
    pub fn rescale(&mut self, factor: f32) {
        for (_, slot) in &mut self.slots {
            for residual in &mut slot.now {
                let scaled = *residual * factor;
                *residual = if scaled.is_finite() { scaled } else { 0.0 };
            }
            slot.squares = sum_squares(&slot.now);
        }
    }

    /// Returns the shape of the last call.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Iterates over the kept residuals as role, chunk number and elements.
    pub fn iter(&self) -> impl Iterator<Item = (Role, usize, &[f32])> {
        self.slots.iter().filter_map(|(number, slot)| {
            let role = [Role::Worker, Role::Owner][number % 2];
            (!slot.now.is_empty()).then_some((role, number / 2, &slot.now[..]))
        })
    }

    /// Sets the residuals of a chunk. [`Residuals::iter`] yields the arguments in this form.
    pub fn put(&mut self, role: Role, chunk: usize, residuals: Vec<f32>) {
        let slot = self.slot(role, chunk);
        slot.squares = sum_squares(&residuals);
        slot.now = residuals;
        self.restored = true;
    }

    /// Returns the sum of the squares of all residuals.
    pub fn sum_squares(&self) -> f64 {
        self.slots.iter().map(|(_, slot)| slot.squares).sum()
    }

    /// Allocates the memory of the chunks that a call of `shape` encodes, with role, chunk number and elements of
    /// each, so that [`Residuals::keep`] allocates nothing.
    ///
    /// # Errors
    /// System error with the bytes of all chunks, if the memory is not there. The residuals have their old values.
    pub fn reserve(&mut self, chunks: &[(Role, usize, usize)]) -> Result<()> {
        let elements: usize = chunks.iter().map(|(_, _, elements)| elements).sum();
        let bytes = elements.saturating_mul(2 * size_of::<f32>());
        let failed = |_| {
            Error::system(
                format!("the residuals of error feedback need {bytes} bytes"),
                std::io::ErrorKind::OutOfMemory,
            )
        };
        self.slots.try_reserve(chunks.len()).map_err(failed)?;
        for &(role, chunk, elements) in chunks {
            let slot = self.slot(role, chunk);
            let missing = |array: &Vec<f32>| elements.saturating_sub(array.len());
            let (now, next) = (missing(&slot.now), missing(&slot.next));
            slot.now.try_reserve_exact(now).map_err(failed)?;
            slot.next.try_reserve_exact(next).map_err(failed)?;
        }
        Ok(())
    }

    /// Returns the number of allocated slots.
    #[cfg(test)]
    pub(super) fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Returns the slot of a chunk and role. Creates the slot at the first encode of the chunk.
    fn slot(&mut self, role: Role, chunk: usize) -> &mut Slot {
        let number = slot_number(role, chunk);
        let at = self.find(number).unwrap_or_else(|at| {
            self.slots.insert(at, (number, Slot::default()));
            at
        });
        &mut self.slots[at].1
    }

    /// Returns the index of a slot, or the index at which it would stand.
    fn find(&self, number: usize) -> std::result::Result<usize, usize> {
        self.slots
            .binary_search_by_key(&number, |(number, _)| *number)
    }
}

/// Numbers the roles of all chunks: two for each chunk, first [`Role::Worker`].
fn slot_number(role: Role, chunk: usize) -> usize {
    2 * chunk + role as usize
}

/// Returns the sum of the squares of `values`, with 16 partial sums, which are independent additions.
fn sum_squares(values: &[f32]) -> f64 {
    let mut sums = [0f64; 16];
    for part in values.chunks(16) {
        for (sum, &value) in sums.iter_mut().zip(part) {
            *sum += f64::from(value) * f64::from(value);
        }
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        kind: 0,
        count: 8,
        chunk: 4,
        chunks: 2,
    };

    /// Stands for a lossy codec: rounds values to whole numbers.
    fn encode(values: &[f32]) -> Vec<f32> {
        values.iter().map(|value| value.round()).collect()
    }

    /// Runs one call of a simple reference implementation, with one flat array, element by element.
    fn oracle(residual: &mut [f32], input: &[f32]) -> Vec<f32> {
        let mut sent = Vec::new();
        for (residual, input) in residual.iter_mut().zip(input) {
            let value = input + *residual;
            sent.push(value.round());
            *residual = value - value.round();
        }
        sent
    }

    fn call(residuals: &mut Residuals, input: &[f32]) -> Vec<f32> {
        residuals.begin(SHAPE);
        let mut sent = Vec::new();
        for (chunk, input) in input.chunks(4).enumerate() {
            // Encodes each chunk in two spans, because the engine encodes tile by tile.
            let mut values = input.to_vec();
            for at in [0, 2] {
                let span = &mut values[at..at + 2];
                residuals.add(Role::Worker, chunk, at, span);
                let decoded = encode(span);
                residuals.keep(Role::Worker, (chunk, 4), at, span, &decoded);
                sent.extend(decoded);
            }
        }
        residuals.commit();
        sent
    }

    #[test]
    fn residuals_in_chunks_and_spans_equal_the_naive_form() {
        let mut residuals = Residuals::new();
        let mut flat = [0f32; 8];
        let mut word = 7u64;
        for _ in 0..100 {
            let input: Vec<f32> = (0..8)
                .map(|_| {
                    word = word.wrapping_mul(6364136223846793005).wrapping_add(1);
                    (word >> 40) as f32 / 1e6 - 8.0
                })
                .collect();
            assert_eq!(call(&mut residuals, &input), oracle(&mut flat, &input));
            let kept: Vec<f32> = residuals
                .iter()
                .flat_map(|(_, _, kept)| kept.to_vec())
                .collect();
            assert_eq!(kept, flat);
        }
    }

    #[test]
    fn values_below_the_step_arrive_after_many_calls() {
        let mut residuals = Residuals::new();
        let sum: f32 = (0..100).map(|_| call(&mut residuals, &[0.25; 8])[5]).sum();
        assert_eq!(sum, 25.0);
    }

    #[test]
    fn second_encode_in_a_call_reads_the_same_residual() {
        let mut residuals = Residuals::new();
        call(&mut residuals, &[0.25; 8]);
        residuals.begin(SHAPE);
        for _ in 0..3 {
            let mut values = [1.0; 4];
            residuals.add(Role::Worker, 0, 0, &mut values);
            assert_eq!(values, [1.25; 4]);
            residuals.keep(Role::Worker, (0, 4), 0, &values, &[1.0; 4]);
        }
        // Roles do not share residuals, and a call that does not commit changes none.
        let mut values = [1.0; 4];
        residuals.add(Role::Owner, 0, 0, &mut values);
        assert_eq!(values, [1.0; 4]);
        residuals.keep(Role::Worker, (0, 4), 0, &[9.0; 4], &[0.0; 4]);
        residuals.begin(SHAPE);
        residuals.commit();
        residuals.add(Role::Worker, 0, 0, &mut values);
        assert_eq!(values, [1.25; 4]);
    }

    #[test]
    fn non_finite_value_leaves_its_residual_unchanged() {
        let mut residuals = Residuals::new();
        call(&mut residuals, &[0.25; 8]);
        let mut input = [0.25; 8];
        input[1] = f32::NAN;
        input[6] = f32::INFINITY;
        let sent = call(&mut residuals, &input);
        assert!(sent[1].is_nan() && sent[6] == f32::INFINITY);
        assert_eq!(
            sent[0],
            1.0f32.round() - 1.0 + 0.5f32.round() - 1.0 + sent[0]
        );
        let sent = call(&mut residuals, &[0.5; 8]);
        // The residual of the NaN element is still 0.25, from the first call.
        assert_eq!(sent[1], (0.25f32 + 0.5).round());
        assert_eq!(residuals.iter().next().unwrap().2[1], -0.25);
        assert!(residuals.sum_squares().is_finite());
    }

    #[test]
    fn residual_that_would_overflow_is_skipped() {
        let mut residuals = Residuals::new();
        residuals.begin(SHAPE);
        residuals.keep(Role::Owner, (1, 1), 0, &[f32::MAX], &[0.0]);
        residuals.commit();
        residuals.begin(SHAPE);
        let mut values = [f32::MAX];
        residuals.add(Role::Owner, 1, 0, &mut values);
        assert_eq!(values, [f32::MAX]);
        residuals.rescale(2.0);
        assert_eq!(residuals.sum_squares(), 0.0);
    }

    #[test]
    fn begin_with_another_shape_clears_and_rescale_multiplies() {
        let mut residuals = Residuals::new();
        call(&mut residuals, &[0.25; 8]);
        residuals.rescale(0.5);
        assert_eq!(residuals.sum_squares(), 8.0 / 64.0);
        residuals.begin(Shape { count: 7, ..SHAPE });
        assert_eq!(residuals.iter().count(), 0);
        residuals.begin(SHAPE);
        assert_eq!(residuals.sum_squares(), 0.0);
    }

    #[test]
    fn reserved_memory_suffices_for_the_call_and_its_lack_is_an_error() {
        let mut residuals = Residuals::new();
        residuals.begin(SHAPE);
        let chunks = [(Role::Worker, 0, 4), (Role::Worker, 1, 4)];
        residuals.reserve(&chunks).unwrap();
        let addresses = |residuals: &Residuals| -> Vec<_> {
            let slots = residuals.slots.iter();
            slots
                .map(|(_, slot)| (slot.now.as_ptr(), slot.next.as_ptr()))
                .collect()
        };
        let reserved = addresses(&residuals);
        assert_eq!(
            residuals.iter().count(),
            0,
            "reserved memory is no residual"
        );
        call(&mut residuals, &[0.3, 1.6, -2.2, 4.0, 5.5, -0.1, 0.0, 7.7]);
        let swapped: Vec<_> = addresses(&residuals)
            .iter()
            .map(|&(now, next)| (next, now))
            .collect();
        assert_eq!(reserved, swapped, "the call allocated nothing");
        let kept = residuals.clone();
        let error = residuals
            .reserve(&[(Role::Worker, 0, usize::MAX / 16)])
            .unwrap_err();
        assert!(error.message().contains("bytes"), "{error}");
        assert_eq!(residuals, kept);
    }

    #[test]
    fn imported_residuals_of_another_shape_are_lost() {
        let other = Shape { chunk: 2, ..SHAPE };
        let mut residuals = Residuals::new();
        assert!(!residuals.are_lost_to(SHAPE));
        residuals.begin(SHAPE);
        residuals.put(Role::Worker, 0, vec![0.5; 4]);
        assert!(residuals.are_lost_to(other) && !residuals.are_lost_to(SHAPE));
        // The first call of equal shape uses the imported residuals, so they can no longer be lost.
        residuals.begin(SHAPE);
        assert!(!residuals.are_lost_to(other));
    }
}
