//! The command line tool.

fn main() {
    println!("cinch {}", cinch::VERSION);
}
