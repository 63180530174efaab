//! Keeps tensor scales from call to call.

/// Scales of one tensor under [`crate::types::ScaleRule::Tensor`], kept between the calls that scan the data
/// for new scales. The caller owns a value for each such tensor and passes it to every call.
///
/// A call encodes a number of chunks and partial sums, always in the same order. Each of these encodes is a
/// site and has its own scale. All scales are dropped when the element count or the number of sites changes.
/// A scale is not kept if its data had a non-finite element. Nor is 0 kept, because it would turn all later
/// data into zeros. Such a site scans again in the next call.
#[derive(Clone, Debug)]
pub struct TensorScales {
    refresh: u32,
    count: usize,
    /// Number of calls since all scales were last dropped.
    age: u32,
    /// Scale of each site; NaN if the site must scan its data.
    scales: Vec<f32>,
}

impl TensorScales {
    /// Creates scales that are renewed every `refresh` calls; 0 counts as 1.
    pub fn new(refresh: u32) -> TensorScales {
        TensorScales {
            refresh: refresh.max(1),
            count: 0,
            age: 0,
            scales: Vec::new(),
        }
    }

    /// Begins a call on `count` elements that has `sites` sites.
    pub fn begin(&mut self, count: usize, sites: usize) {
        let same = self.count == count && self.scales.len() == sites;
        self.age += 1;
        if !same || self.age >= self.refresh {
            self.count = count;
            self.age = 0;
            self.scales.clear();
            self.scales.resize(sites, f32::NAN);
        }
    }

    /// Returns the scale of a site: the kept scale, or a new scale from `scan`. `scan` returns the largest
    /// finite magnitude and the number of non-finite elements ([`super::abs_max`]).
    ///
    /// # Panics
    /// If `site` is not below the number of sites of [`TensorScales::begin`].
    pub fn scale(&mut self, site: usize, scan: impl FnOnce() -> (f32, u64)) -> f32 {
        let kept = &mut self.scales[site];
        if kept.is_nan() {
            let (scale, non_finite) = scan();
            if non_finite > 0 || scale == 0.0 {
                return scale;
            }
            *kept = scale;
        }
        *kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a call and returns the scales and the number of sites that were scanned.
    fn call(scales: &mut TensorScales, count: usize, found: &[(f32, u64)]) -> (Vec<f32>, usize) {
        let mut looks = 0;
        scales.begin(count, found.len());
        let used = found.iter().enumerate().map(|(site, &found)| {
            scales.scale(site, || {
                looks += 1;
                found
            })
        });
        let used = used.collect();
        (used, looks)
    }

    #[test]
    fn scales_are_kept_for_refresh_calls() {
        let mut scales = TensorScales::new(3);
        for round in 0..4 {
            let fresh = (1.0 + round as f32, 0);
            assert_eq!(call(&mut scales, 8, &[fresh; 2]), (vec![fresh.0; 2], 2));
            for _ in 0..2 {
                assert_eq!(call(&mut scales, 8, &[(99.0, 0); 2]), (vec![fresh.0; 2], 0));
            }
        }
    }

    #[test]
    fn refresh_of_one_scans_every_call() {
        let mut scales = TensorScales::new(1);
        for i in 1..5 {
            assert_eq!(call(&mut scales, 8, &[(i as f32, 0)]), (vec![i as f32], 1));
        }
    }

    #[test]
    fn another_count_or_site_number_drops_all_scales() {
        let mut scales = TensorScales::new(100);
        call(&mut scales, 8, &[(1.0, 0); 2]);
        assert_eq!(call(&mut scales, 9, &[(2.0, 0); 2]).1, 2);
        assert_eq!(call(&mut scales, 9, &[(3.0, 0); 3]).1, 3);
        assert_eq!(call(&mut scales, 9, &[(4.0, 0); 3]), (vec![3.0; 3], 0));
    }

    #[test]
    fn scale_of_non_finite_or_zero_data_is_not_kept() {
        let mut scales = TensorScales::new(100);
        assert_eq!(
            call(&mut scales, 8, &[(1.0, 1), (0.0, 0)]),
            (vec![1.0, 0.0], 2)
        );
        assert_eq!(
            call(&mut scales, 8, &[(2.0, 0), (3.0, 0)]),
            (vec![2.0, 3.0], 2)
        );
        assert_eq!(
            call(&mut scales, 8, &[(9.0, 0), (9.0, 0)]),
            (vec![2.0, 3.0], 0)
        );
    }
}
