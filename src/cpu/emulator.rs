//! Detects a processor that QEMU emulates in software (TCG).

use std::arch::x86_64::{__cpuid, CpuidResult};
use std::sync::LazyLock;

/// Bit of leaf 1 in register ECX that is set in virtual machines.
const HYPERVISOR: u32 = 1 << 31;

/// First leaf of the hypervisor, whose other registers contain its name.
const NAME_LEAF: u32 = 0x4000_0000;

/// Name of the emulator. A machine that QEMU runs with KVM has the name of KVM.
const TCG: [u8; 12] = *b"TCGTCGTCGTCG";

/// Returns whether QEMU emulates this processor, be it for a machine (`qemu-system`) or for a process (`qemu-user`).
/// Docker runs containers for other architectures by the latter.
///
/// Gathers are wrong in versions 7.2 to 9.0, which have AVX2: they ignore indexes in vector register 4
/// (<https://gitlab.com/qemu-project/qemu/-/issues/2474>). The compiler chooses the register, so a build is wrong by
/// chance. An emulated program cannot read QEMU's version.
pub(super) fn is_tcg() -> bool {
    static IS_TCG: LazyLock<bool> = LazyLock::new(|| {
        let is_virtual = cpuid(1).ecx & HYPERVISOR != 0;
        is_virtual && name(&cpuid(NAME_LEAF)) == TCG
    });
    *IS_TCG
}

/// Returns the name that a hypervisor's first leaf contains.
fn name(leaf: &CpuidResult) -> [u8; 12] {
    let words = [leaf.ebx, leaf.ecx, leaf.edx].map(u32::to_le_bytes);
    *words.as_flattened().first_chunk().unwrap()
}

fn cpuid(leaf: u32) -> CpuidResult {
    #[allow(
        unused_unsafe,
        reason = "newer versions of Rust declare the function safe"
    )]
    // SAFETY: every x86-64 processor has the instruction, which touches no memory.
    unsafe {
        __cpuid(leaf)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;
    use std::arch::asm;
    use std::arch::x86_64::{__m256i, _mm256_set1_epi32, _mm256_setr_epi32};

    /// Gathers entries 1 to 8 of a table of 16 by indexes in vector register 4.
    #[target_feature(enable = "avx2")]
    fn gather_by_register_4(table: &[i32; 16]) -> [i32; 8] {
        let index = _mm256_setr_epi32(1, 2, 3, 4, 5, 6, 7, 8);
        let mut found = _mm256_set1_epi32(0);
        // SAFETY: the indexes are below 16. The mask selects all of them, and the instruction clears it.
        unsafe {
            asm!(
                "vpgatherdd {found}, [{table} + ymm4 * 4], {mask}",
                table = in(reg) table,
                in("ymm4") index,
                found = inout(ymm_reg) found,
                mask = inout(ymm_reg) _mm256_set1_epi32(-1) => _,
                options(readonly, nostack, preserves_flags),
            );
        }
        // SAFETY: both types have 32 bytes, of which every value is valid.
        unsafe { std::mem::transmute::<__m256i, [i32; 8]>(found) }
    }

    /// Runs in the emulated machines of `scripts/test-rdma`, too.
    #[test]
    fn vector_code_is_selected_only_where_gathers_are_right() {
        if Isa::detect() == Isa::Scalar {
            return;
        }
        let table = std::array::from_fn(|entry| 100 + entry as i32);
        // SAFETY: all sets but the scalar one include AVX2.
        let found = unsafe { gather_by_register_4(&table) };
        assert_eq!(found, [101, 102, 103, 104, 105, 106, 107, 108]);
    }

    #[test]
    fn name_has_the_bytes_of_three_registers_in_order() {
        let leaf = CpuidResult {
            eax: 0x4000_0001,
            ebx: u32::from_le_bytes(*b"KVMK"),
            ecx: u32::from_le_bytes(*b"VMKV"),
            edx: u32::from_le_bytes(*b"M\0\0\0"),
        };
        assert_eq!(&name(&leaf), b"KVMKVMKVM\0\0\0");
    }
}
