//! Seeded changes of inputs.

use cinch::testing::Random;

/// Numbers at which code goes wrong.
const NUMBERS: [u64; 12] = [
    0,
    1,
    0x7f,
    0xff,
    0x100,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 32,
    i64::MAX as u64,
    u64::MAX,
];

/// Returns one of `inputs` with one to eight changes, and at most `longest` bytes.
pub fn mutated(inputs: &[&[u8]], longest: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes = inputs[random.below(inputs.len())].to_vec();
    for _ in 0..=random.below(8) {
        change(&mut bytes, inputs, random);
        bytes.truncate(longest);
    }
    bytes
}

fn change(bytes: &mut Vec<u8>, inputs: &[&[u8]], random: &mut Random) {
    let at = random.below(bytes.len() + 1);
    let end = (at + random.below(32)).min(bytes.len());
    match random.below(7) {
        0 if at < end => bytes[at] = random.word() as u8,
        1 if at < end => bytes[at] ^= 1 << random.below(8),
        2 => drop(bytes.drain(at..end)),
        3 => {
            let copy = bytes[at..end].to_vec();
            bytes.splice(at..at, copy);
        }
        4 => {
            let number = NUMBERS[random.below(NUMBERS.len())].to_le_bytes();
            let width = (1 << random.below(4)).min(bytes.len() - at);
            bytes[at..at + width].copy_from_slice(&number[..width]);
        }
        5 => {
            let other = inputs[random.below(inputs.len())];
            let from = random.below(other.len() + 1);
            let piece = other[from..(from + random.below(64)).min(other.len())].to_vec();
            bytes.splice(at..end, piece);
        }
        _ => bytes.extend((0..random.below(16)).map(|_| random.word() as u8)),
    }
}
