//! The images, and their division into training and test sets.

use cinch::testing::random_word;

pub const PIXELS: usize = 64;
pub const CLASSES: usize = 10;
const TEST: usize = 360;

/// All samples in order: each has its label, then its pixels from 0 to 16.
static SAMPLES: &[u8] = include_bytes!("digits.bin");

/// Returns the number of samples.
pub fn count() -> usize {
    SAMPLES.len() / (PIXELS + 1)
}

fn sample(index: usize) -> &'static [u8] {
    &SAMPLES[index * (PIXELS + 1)..][..PIXELS + 1]
}

/// Returns the digit of sample `index`.
pub fn label(index: usize) -> usize {
    sample(index)[0].into()
}

/// Reads the pixels of sample `index`, scaled to 0 to 1.
pub fn read(index: usize, image: &mut [f32]) {
    for (to, &from) in image.iter_mut().zip(&sample(index)[1..]) {
        *to = f32::from(from) / 16.0;
    }
}

/// The sample numbers of the training set and of the test set.
pub struct Split {
    pub train: Vec<usize>,
    pub test: Vec<usize>,
}

/// Divides the samples at random.
pub fn split(seed: u64) -> Split {
    let mut all: Vec<usize> = (0..count()).collect();
    shuffle(&mut all, seed);
    let test = all.split_off(all.len() - TEST);
    Split { train: all, test }
}

/// Shuffles numbers at random.
pub fn shuffle(indexes: &mut [usize], seed: u64) {
    for last in (1..indexes.len()).rev() {
        let other = random_word(seed, last as u64) % (last as u64 + 1);
        indexes.swap(last, other as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_equal_the_description_of_the_data_set() {
        assert_eq!((count(), SAMPLES.len() % (PIXELS + 1)), (1797, 0));
        assert!((0..count()).all(|at| label(at) < CLASSES));
        assert!(
            SAMPLES
                .chunks(PIXELS + 1)
                .all(|sample| sample[1..].iter().all(|&p| p <= 16))
        );
        // Expected number of samples of each digit, from the description of the data set.
        let of = |digit| (0..count()).filter(|&at| label(at) == digit).count();
        let counts: Vec<usize> = (0..CLASSES).map(of).collect();
        assert_eq!(counts, [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]);
    }

    #[test]
    fn splits_are_disjoint_and_differ() {
        let split = split(1);
        assert_eq!((split.train.len(), split.test.len()), (1437, 360));
        assert!(
            split
                .test
                .iter()
                .all(|sample| !split.train.contains(sample))
        );
        assert_ne!(split.test, super::split(2).test);
    }
}
