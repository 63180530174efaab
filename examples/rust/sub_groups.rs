//! Splits the ranks into a grid, as tensor and data parallelism do, and checks a collective along
//! each axis.
//!
//! ```sh
//! cargo build --release --workspace --bins --examples
//! target/release/cinch run -n 4 -- target/release/examples/sub_groups
//! ```

use cinch::{Communicator, Config, Error, ReduceOp};

/// Number of ranks in a row of the grid; together they hold the parts of one model. With an odd
/// number of ranks the last row has one rank.
const ROW: usize = 2;

fn main() -> cinch::Result<()> {
    let world = Communicator::from_env(Config::from_env()?)?;
    let (rank, nranks) = (world.rank(), world.nranks());

    // All ranks call split. Equal colors share a communicator; the key orders its ranks.
    let row = split(&world, rank / ROW)?;
    let column = split(&world, rank % ROW)?;

    // Every rank holds one partial sum of its row's model.
    let mut partial = [rank as u64];
    row.all_reduce_in_place(&mut partial, ReduceOp::Sum)?;
    let first = rank / ROW * ROW;
    let members = first..(first + ROW).min(nranks);
    check(
        rank,
        "the row's sum",
        &partial,
        &[members.sum::<usize>() as u64],
    )?;

    // The ranks of a column hold one part of the model in every row; each rank gathers all copies
    // of this part.
    let mut gathered = vec![0u64; column.nranks()];
    column.all_gather(&[rank as u64], &mut gathered)?;
    let expected: Vec<u64> = (rank % ROW..nranks)
        .step_by(ROW)
        .map(|r| r as u64)
        .collect();
    check(rank, "the column's ranks", &gathered, &expected)?;

    println!(
        "rank {rank} of {nranks}: rank {} of {} in its row, {} of {} in its column",
        row.rank(),
        row.nranks(),
        column.rank(),
        column.nranks()
    );
    column.finalize()?;
    row.finalize()?;
    world.finalize()
}

/// Returns the communicator of all ranks with this color.
fn split(world: &Communicator, color: usize) -> cinch::Result<Communicator> {
    let split = world.split(Some(color as u32), world.rank() as i64)?;
    Ok(split.expect("a rank with a color is in a communicator"))
}

/// Fails with an error that shows both values if they differ.
fn check(rank: usize, what: &str, found: &[u64], expected: &[u64]) -> cinch::Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::internal(format!(
        "rank {rank}: {what}: {found:?}, expected {expected:?}"
    )))
}
