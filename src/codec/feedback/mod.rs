//! Error feedback: the residuals of all tensors of one rank, and their checkpoint format.
//!
//! The engine uses it for calls that name a tensor (`Call::feedback`). It adds the residual to the input of
//! each lossy encode, and keeps the error of that encode as the new residual. [`Residuals`] holds one tensor.

mod contraction;
mod residuals;

pub use contraction::{Contraction, Norm, check_codecs, contraction, damp, damping};
pub use residuals::{BY_ELEMENT, Residuals, Role, Shape};

use crate::error::{Error, Result};
use std::collections::{HashMap, HashSet};

/// Largest number of tensors that may have residuals.
const MAX_TENSORS: usize = 65_536;

/// Largest number of chunks of one tensor that [`Feedback::import`] accepts.
const MAX_CHUNKS: u64 = 1 << 20;

/// First bytes of exported residuals; the last digit is the format's version.
const MAGIC: &[u8; 8] = b"cinchEF1";

/// Residuals of all tensors, by the tensor id that callers pass.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Feedback {
    tensors: HashMap<u64, Residuals>,
}

impl Feedback {
    /// Creates a value without residuals.
    pub fn new() -> Feedback {
        Feedback::default()
    }

    /// Checks that the tensors of calls that run together, with the tensors that already have
    /// residuals, stay within the limit.
    ///
    /// # Errors
    /// Invalid usage beyond 65,536 tensors: residuals only help a tensor that is passed again under
    /// its id.
    pub fn admit(&self, ids: impl IntoIterator<Item = u64>) -> Result<()> {
        let is_known = |tensor| self.tensors.contains_key(&tensor);
        Feedback::admit_to(self.tensors.len(), is_known, ids)
    }

    /// Checks the limit of [`Feedback::admit`] for residuals that are stored elsewhere, for example on a GPU.
    /// `tensors` is how many tensors have residuals there, and `is_known` returns whether an id is among
    /// them.
    ///
    /// # Errors
    /// As [`Feedback::admit`].
    pub fn admit_to(
        tensors: usize,
        is_known: impl Fn(u64) -> bool,
        ids: impl IntoIterator<Item = u64>,
    ) -> Result<()> {
        let mut new = HashSet::new();
        for tensor in ids {
            if !is_known(tensor) && new.insert(tensor) && tensors + new.len() > MAX_TENSORS {
                return Err(Error::invalid_usage(format!(
                    "{MAX_TENSORS} tensors have residuals of error feedback or get them with \
                     this group, and tensor {tensor} is one more: give a tensor the same id in \
                     every step, or forget residuals first"
                )));
            }
        }
        Ok(())
    }

    /// Removes and returns the residuals of `tensor` for a call; empty before its first call.
    pub fn take(&mut self, tensor: u64) -> Residuals {
        self.tensors.remove(&tensor).unwrap_or_default()
    }

    /// Puts the residuals of `tensor` back after the call.
    pub fn give_back(&mut self, tensor: u64, residuals: Residuals) {
        self.tensors.insert(tensor, residuals);
    }

    /// Returns the residuals of `tensor`, if it has any.
    pub fn residuals(&self, tensor: u64) -> Option<&Residuals> {
        self.tensors.get(&tensor)
    }

    /// Checks that a communicator on host memory can use these residuals.
    ///
    /// # Errors
    /// Invalid argument if some tensor's residuals come from a communicator on a GPU, which stores
    /// them element by element.
    pub fn check_chunks(&self) -> Result<()> {
        self.check_kind(BY_ELEMENT, "GPU, which keeps them element by element")
    }

    /// Checks that a communicator on a GPU can use these residuals.
    ///
    /// # Errors
    /// Invalid argument if some tensor's residuals come from a communicator on host memory, which stores them
    /// in chunks. Also if a tensor is not one array with the element count of its shape.
    pub fn check_elements(&self) -> Result<()> {
        self.check_kind(0, "communicator on host memory, which keeps them in chunks")?;
        for (tensor, residuals) in self.iter() {
            let elements = residuals.shape().chunk;
            let arrays: Vec<_> = residuals.iter().collect();
            let whole = |values: &[f32]| values.len() as u64 == elements;
            if !matches!(arrays[..], [(Role::Worker, _, values)] if whole(values)) {
                return Err(Error::invalid_argument(format!(
                    "the residuals of tensor {tensor} are not one array of {elements} elements, \
                     as they say"
                )));
            }
        }
        Ok(())
    }

    fn check_kind(&self, foreign: u64, of: &str) -> Result<()> {
        let mut tensors = self.tensors.iter();
        let found = tensors.find(|(_, found)| found.shape().kind & BY_ELEMENT == foreign);
        let Some((tensor, _)) = found else {
            return Ok(());
        };
        Err(Error::invalid_argument(format!(
            "the residuals of tensor {tensor} are of a {of}: start without residuals here"
        )))
    }

    /// Iterates over the tensors that have residuals, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &Residuals)> {
        self.tensors.iter().map(|(id, residuals)| (*id, residuals))
    }

    /// Drops the residuals of one tensor, or of all tensors if `tensor` is `None`.
    pub fn forget(&mut self, tensor: Option<u64>) {
        match tensor {
            Some(tensor) => drop(self.tensors.remove(&tensor)),
            None => self.tensors.clear(),
        }
    }

    /// Multiplies all residuals by `factor`, for example when the loss scale changes.
    ///
    /// # Errors
    /// Invalid argument if the factor is negative or not finite.
    pub fn rescale(&mut self, factor: f32) -> Result<()> {
        if !(factor.is_finite() && factor >= 0.0) {
            return Err(Error::invalid_argument(format!(
                "residuals cannot be rescaled by {factor}; the factor is finite and not negative"
            )));
        }
        for residuals in self.tensors.values_mut() {
            residuals.rescale(factor);
        }
        Ok(())
    }

    /// Serialises all residuals. [`Feedback::import`] reads them on a rank of equal number in a
    /// communicator with as many ranks.
    ///
    /// All integers are little endian. The header is magic, rank and ranks (u32), and the number of
    /// tensors (u64). Each tensor has its id, the four numbers of its shape, and its number of
    /// arrays. Each array has its role, chunk, element count, and elements as fp32.
    pub fn export(&self, rank: usize, nranks: usize) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend((rank as u32).to_le_bytes());
        bytes.extend((nranks as u32).to_le_bytes());
        let mut tensors: Vec<_> = self.tensors.iter().collect();
        // Sorts the tensors, so that equal residuals give equal bytes.
        tensors.sort_unstable_by_key(|(tensor, _)| **tensor);
        bytes.extend((tensors.len() as u64).to_le_bytes());
        for (tensor, residuals) in tensors {
            let Shape {
                kind,
                count,
                chunk,
                chunks,
            } = residuals.shape();
            let arrays = residuals.iter().count() as u64;
            for word in [*tensor, kind, count, chunk, chunks, arrays] {
                bytes.extend(word.to_le_bytes());
            }
            for (role, chunk, values) in residuals.iter() {
                for word in [role as u64, chunk as u64, values.len() as u64] {
                    bytes.extend(word.to_le_bytes());
                }
                bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
        }
        bytes
    }

    /// Reads residuals that [`Feedback::export`] wrote.
    ///
    /// # Errors
    /// Invalid argument if the bytes are not exported residuals, are damaged, or come from another
    /// rank or another number of ranks.
    pub fn import(bytes: &[u8], rank: usize, nranks: usize) -> Result<Feedback> {
        let mut reader = ResidualReader { bytes, at: 0 };
        if reader.take(8)? != MAGIC {
            return Err(Error::invalid_argument(
                "these are no residuals of error feedback in the format of this release",
            ));
        }
        let (their_rank, their_nranks) = (reader.u32()? as usize, reader.u32()? as usize);
        if (their_rank, their_nranks) != (rank, nranks) {
            return Err(Error::invalid_argument(format!(
                "residuals of rank {their_rank} of {their_nranks} do not fit rank {rank} of \
                 {nranks}; start without residuals where the ranks changed"
            )));
        }
        let tensors = reader.bounded("tensors", MAX_TENSORS as u64)?;
        let mut feedback = Feedback::new();
        for _ in 0..tensors {
            let (tensor, residuals) = reader.tensor()?;
            if feedback.tensors.insert(tensor, residuals).is_some() {
                return Err(reader.damaged(&format!("tensor {tensor} stands there twice")));
            }
        }
        if reader.at != bytes.len() {
            return Err(reader.damaged("there are bytes behind the end"));
        }
        Ok(feedback)
    }
}

/// Reads exported bytes and checks every field, because the bytes may be damaged.
struct ResidualReader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> ResidualReader<'a> {
    fn damaged(&self, why: &str) -> Error {
        Error::invalid_argument(format!(
            "residuals of {} bytes are damaged at byte {}: {why}",
            self.bytes.len(),
            self.at
        ))
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let end = self.at.checked_add(n);
        let Some(taken) = end.and_then(|end| self.bytes.get(self.at..end)) else {
            return Err(self.damaged("they end too early"));
        };
        self.at += n;
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32> {
        let mut word = [0; 4];
        word.copy_from_slice(self.take(4)?);
        Ok(u32::from_le_bytes(word))
    }

    fn u64(&mut self) -> Result<u64> {
        let mut word = [0; 8];
        word.copy_from_slice(self.take(8)?);
        Ok(u64::from_le_bytes(word))
    }

    /// Reads a count and rejects values above `most`, before anything is allocated for the count.
    fn bounded(&mut self, what: &str, most: u64) -> Result<usize> {
        let number = self.u64()?;
        if number > most {
            return Err(self.damaged(&format!("{number} {what}, of at most {most}")));
        }
        Ok(number as usize)
    }

    fn tensor(&mut self) -> Result<(u64, Residuals)> {
        let tensor = self.u64()?;
        let (kind, count, chunk) = (self.u64()?, self.u64()?, self.u64()?);
        // A chunk without residuals takes neither bytes in the input nor memory.
        let chunks = self.bounded("chunks", MAX_CHUNKS)?;
        let arrays = self.bounded("arrays", 2 * chunks as u64)?;
        let mut residuals = Residuals::new();
        residuals.begin(Shape {
            kind,
            count,
            chunk,
            chunks: chunks as u64,
        });
        let mut last = None;
        for _ in 0..arrays {
            let role = match self.u64()? {
                0 => Role::Worker,
                1 => Role::Owner,
                other => return Err(self.damaged(&format!("{other} is no role"))),
            };
            let number = self.u64()?;
            if number >= chunks as u64 {
                return Err(self.damaged(&format!("chunk {number} of {chunks}")));
            }
            let place = (number, role as u64);
            if last.is_some_and(|last| last >= place) {
                return Err(self.damaged(&format!("chunk {number} is not in ascending order")));
            }
            last = Some(place);
            let elements = self.bounded("elements", chunk)?;
            let raw = self.take(elements.saturating_mul(4))?;
            let values: Vec<f32> = raw
                .chunks_exact(4)
                .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
                .collect();
            if values.iter().any(|value| !value.is_finite()) {
                return Err(self.damaged("a residual is not finite"));
            }
            residuals.put(role, number as usize, values);
        }
        Ok((tensor, residuals))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On a GPU, the residuals of a tensor are one array of all elements, with role `Worker`.
    #[test]
    fn gpu_residuals_with_wrong_arrays_are_rejected() {
        let of = |roles: &[Role], chunk: u64, values: usize| {
            let (mut feedback, mut residuals) = (Feedback::new(), Residuals::new());
            residuals.begin(Shape {
                kind: BY_ELEMENT,
                count: chunk,
                chunk,
                chunks: 1,
            });
            for &role in roles {
                residuals.put(role, 0, vec![1.0; values]);
            }
            feedback.give_back(7, residuals);
            feedback.check_elements()
        };
        let one: &[Role] = &[Role::Worker];
        of(one, 4, 4).unwrap();
        for (roles, chunk, values) in [
            (one, 1 << 60, 4),
            (one, 4, 3),
            (one, 0, 0),
            (&[], 4, 4),
            (&[Role::Owner], 4, 4),
            (&[Role::Worker, Role::Owner], 4, 4),
        ] {
            let error = of(roles, chunk, values).unwrap_err();
            assert!(error.message().contains("tensor 7"), "{error}");
        }
    }

    fn filled() -> Feedback {
        let mut feedback = Feedback::new();
        for tensor in [9, 3] {
            let mut residuals = feedback.take(tensor);
            residuals.begin(Shape {
                kind: 5,
                count: 10,
                chunk: 4,
                chunks: 3,
            });
            residuals.keep(Role::Worker, (0, 4), 0, &[1.5; 4], &[1.0; 4]);
            residuals.keep(Role::Owner, (2, 2), 0, &[tensor as f32; 2], &[0.0; 2]);
            residuals.commit();
            feedback.give_back(tensor, residuals);
        }
        feedback
    }

    /// Exports only what callers can see: the residuals of the last committed call, without
    /// `Slot::next`.
    fn visible(feedback: &Feedback) -> Vec<u8> {
        feedback.export(0, 1)
    }

    #[test]
    fn import_of_exported_residuals_restores_them() {
        let feedback = filled();
        let bytes = feedback.export(1, 4);
        assert_eq!(bytes.len(), 24 + 2 * (48 + 2 * 24 + 6 * 4));
        let again = Feedback::import(&bytes, 1, 4).unwrap();
        assert_eq!(visible(&again), visible(&feedback));
        assert_eq!(again.residuals(9).unwrap().sum_squares(), 1.0 + 162.0);
        assert_eq!(bytes, filled().export(1, 4));
    }

    #[test]
    fn import_of_foreign_or_damaged_bytes_fails() {
        let bytes = filled().export(1, 4);
        for (rank, nranks) in [(0, 4), (1, 2)] {
            let error = Feedback::import(&bytes, rank, nranks).unwrap_err();
            assert!(error.message().contains("rank 1 of 4"), "{error}");
        }
        for cut in 0..bytes.len() {
            assert!(Feedback::import(&bytes[..cut], 1, 4).is_err(), "{cut}");
        }
        let longer: Vec<u8> = bytes.iter().copied().chain([0]).collect();
        assert!(Feedback::import(&longer, 1, 4).is_err());
        // Import of damaged bytes neither panics nor allocates without bound.
        for at in 0..bytes.len() {
            for value in [0x7f, 0xff, 0x80] {
                let mut bytes = bytes.clone();
                bytes[at] = value;
                let _ = Feedback::import(&bytes, 1, 4);
            }
        }
    }

    /// A chunk far away from the others once allocated all chunks before it.
    #[test]
    fn import_allocates_what_the_bytes_carry() {
        let tensor = |tensor: u64, chunks: &[u64]| {
            let shape = [tensor, 5, 10, 4, MAX_CHUNKS, chunks.len() as u64];
            let mut bytes: Vec<u8> = shape.iter().flat_map(|word| word.to_le_bytes()).collect();
            for chunk in chunks {
                let words = [1, *chunk, 0].map(u64::to_le_bytes);
                bytes.extend(words.as_flattened());
            }
            bytes
        };
        let file = |tensors: &[Vec<u8>]| {
            let mut bytes = Feedback::new().export(1, 4);
            bytes[16..24].copy_from_slice(&(tensors.len() as u64).to_le_bytes());
            bytes.extend(tensors.iter().flatten());
            Feedback::import(&bytes, 1, 4)
        };
        let last = MAX_CHUNKS - 1;
        let many: Vec<Vec<u8>> = (0..100).map(|at| tensor(at, &[last])).collect();
        let feedback = file(&many).unwrap();
        let slots: usize = feedback.iter().map(|(_, one)| one.slots()).sum();
        assert_eq!(slots, 100);
        for unsorted in [[last, 0], [7, 7]] {
            let error = file(&[tensor(1, &unsorted)]).unwrap_err();
            assert!(error.message().contains("ascending order"), "{error}");
        }
    }

    #[test]
    fn forget_and_rescale_change_the_named_tensors() {
        let mut feedback = filled();
        feedback.rescale(2.0).unwrap();
        assert_eq!(feedback.residuals(3).unwrap().sum_squares(), 4.0 + 72.0);
        for factor in [f32::NAN, f32::INFINITY, -1.0] {
            assert!(feedback.rescale(factor).is_err());
        }
        feedback.forget(Some(3));
        assert!(feedback.residuals(3).is_none() && feedback.residuals(9).is_some());
        feedback.forget(None);
        assert_eq!(feedback, Feedback::new());
    }

    #[test]
    fn admit_beyond_the_tensor_limit_fails() {
        let mut feedback = Feedback::new();
        for tensor in 0..MAX_TENSORS as u64 {
            feedback.admit([tensor]).unwrap();
            feedback.give_back(tensor, Residuals::new());
        }
        feedback.admit([7]).unwrap();
        assert!(feedback.admit([1 << 40]).is_err());

        // The limit also holds within one group. A tensor that the group names twice counts once.
        let group = || 0..MAX_TENSORS as u64;
        let feedback = filled();
        feedback.admit(group()).unwrap();
        feedback.admit(group().chain(group())).unwrap();
        let error = feedback.admit(group().chain([1 << 40])).unwrap_err();
        assert!(error.message().contains("tensor 1099511627776"), "{error}");
        // `filled` has two tensors, 3 and 9, and the ids from 10 on are all new.
        assert!(feedback.admit(10..10 + MAX_TENSORS as u64 - 2).is_ok());
        assert!(feedback.admit(10..10 + MAX_TENSORS as u64 - 1).is_err());
    }
}
