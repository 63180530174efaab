use super::super::{SharedPump, TcpRecv, TcpSend, join};
use super::*;
use crate::mem::FifoShape;
use crate::transport::{RecvEnd, RecvInto, SendEnd, SendFrom};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

const SHAPE: FifoShape = FifoShape {
    depth: 4,
    slot_bytes: 128,
};

fn side(streams: Vec<UnixStream>) -> (TcpSend, TcpRecv, SharedPump) {
    let sockets = streams.into_iter().map(|stream| {
        stream.set_nonblocking(true).unwrap();
        socket::Socket::from(OwnedFd::from(stream)).into()
    });
    join(SHAPE, sockets.collect(), "rank 1 (host there, pid 2)").unwrap()
}

fn frame(number: u64, bytes: u32) -> [u8; FRAME] {
    let header = Header {
        bytes,
        signature: [1, 2, 3, 4, u64::MAX],
        crc: 0,
    };
    encode(&header, number)
}

#[test]
fn frames_cut_anywhere_arrive_in_slots() {
    let mut wire = Vec::new();
    for (number, bytes) in [0, 128, 1, 64, 0, 0, 127].into_iter().enumerate() {
        wire.extend(frame(number as u64, bytes));
        wire.extend((0..bytes).map(|byte| byte as u8 ^ number as u8));
    }
    for piece in [1, 7, 63, 64, 65, 100, 1000] {
        let (mut there, here) = UnixStream::pair().unwrap();
        let (_send, mut recv, _pump) = side(vec![here]);
        let mut seen = 0_u64;
        for piece in wire.chunks(piece) {
            there.write_all(piece).unwrap();
            while recv.ready().unwrap() {
                let header = recv.header();
                assert_eq!(header.signature, [1, 2, 3, 4, u64::MAX]);
                assert_eq!(header.bytes, [0, 128, 1, 64, 0, 0, 127][seen as usize]);
                let right = |(at, &byte): (usize, &u8)| byte == at as u8 ^ seen as u8;
                assert!(recv.payload().iter().enumerate().all(right));
                recv.release();
                seen += 1;
            }
        }
        assert_eq!(seen, 7, "in pieces of {piece}");
    }
}

/// The beginning of a message may lie in its slot before the first zero-copy call.
#[test]
fn frames_cut_anywhere_arrive_in_the_callers_memory() {
    let lengths = [0, 128, 1, 64, 0, 0, 127, 128];
    let mut wire = Vec::new();
    for (number, bytes) in lengths.into_iter().enumerate() {
        wire.extend(frame(number as u64, bytes));
        wire.extend((0..bytes).map(|byte| byte as u8 ^ number as u8));
    }
    for piece in [1, 7, 63, 64, 65, 100, 1000] {
        for unasked in [0, 1, 2, 5] {
            let (mut there, here) = UnixStream::pair().unwrap();
            let (_send, mut recv, pump) = side(vec![here]);
            let mut place = [0; 128];
            let mut seen = 0;
            for (index, piece) in wire.chunks(piece).enumerate() {
                there.write_all(piece).unwrap();
                if unasked > 0 && index % unasked == 0 {
                    pump.progress();
                }
                while let Some(header) = recv.expect().unwrap() {
                    assert_eq!(header.bytes, lengths[seen]);
                    let place = &mut place[..header.bytes as usize];
                    if !recv.recv_into(place).unwrap() {
                        break;
                    }
                    let right = |(at, &byte): (usize, &u8)| byte == at as u8 ^ seen as u8;
                    assert!(place.iter().enumerate().all(right), "message {seen}");
                    seen += 1;
                }
            }
            assert_eq!(seen, lengths.len(), "in pieces of {piece}");
            assert!(!recv.ready().unwrap());
        }
    }
}

#[test]
fn claimed_message_is_read_by_its_claimant_alone() {
    let (mut first, one) = UnixStream::pair().unwrap();
    let (mut second, two) = UnixStream::pair().unwrap();
    let (_send, mut recv, pump) = side(vec![one, two]);
    let readable = || {
        let mut interests = Vec::new();
        pump.lock().interests(&mut interests).unwrap();
        let reads = interests.iter();
        reads.filter(|one| one.events & libc::POLLIN != 0).count()
    };
    assert_eq!(readable(), 2);
    assert_eq!(recv.expect().unwrap(), None);
    assert_eq!(readable(), 1, "only what brings the next message");
    second.write_all(&frame(1, 0)).unwrap();
    first.write_all(&frame(0, 2)).unwrap();
    first.write_all(b"a").unwrap();
    pump.progress();
    let mut place = [0; 2];
    assert_eq!(recv.expect().unwrap().unwrap().bytes, 2);
    assert!(!recv.recv_into(&mut place).unwrap());
    // The rest of the message arrives before the progress call, which must leave it in the socket.
    first.write_all(b"b").unwrap();
    pump.progress();
    assert!(!recv.ready().unwrap());
    assert!(recv.recv_into(&mut place).unwrap());
    assert_eq!(&place, b"ab");
    assert_eq!(readable(), 2);
    assert!(recv.ready().unwrap());
    recv.release();
}

#[test]
fn end_within_a_zero_copy_message_is_an_error() {
    let (mut there, here) = UnixStream::pair().unwrap();
    let (_send, mut recv, _pump) = side(vec![here]);
    there.write_all(&frame(0, 3)).unwrap();
    there.write_all(b"ab").unwrap();
    let mut place = [0; 3];
    assert!(recv.expect().unwrap().is_some());
    assert!(!recv.recv_into(&mut place).unwrap());
    drop(there);
    for error in [
        recv.recv_into(&mut place).unwrap_err(),
        recv.expect().unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Remote);
        assert!(error.message().contains("rank 1 (host there"), "{error}");
    }
}

#[test]
fn zero_copy_message_keeps_its_order_among_slots() {
    let (there, here) = UnixStream::pair().unwrap();
    let (mut send, _recv, pump) = side(vec![here]);
    let (_other, mut recv, _pump) = side(vec![there]);
    let header = |bytes: usize, number: u64| Header {
        bytes: bytes as u32,
        signature: [number; 5],
        crc: 0,
    };
    let lent = [7; 128];
    // Fills the kernel's buffers, so that the last messages stay in slots.
    let mut sent = 0;
    while send.ready().unwrap() {
        send.slot().fill(sent as u8);
        send.publish(header(128, sent));
        sent += 1;
    }
    assert!(!send.send_from(header(128, sent), &lent).unwrap());
    let mut seen = 0;
    let mut take = |recv: &mut TcpRecv| {
        assert_eq!(recv.header(), header(128, seen));
        let byte = if seen == sent { 7 } else { seen as u8 };
        assert!(recv.payload().iter().all(|&found| found == byte));
        recv.release();
        seen += 1;
    };
    while !send.send_from(header(128, sent), &lent).unwrap() {
        if recv.ready().unwrap() {
            take(&mut recv);
        }
    }
    pump.progress();
    assert!(send.ready().unwrap());
    send.slot().fill((sent + 1) as u8);
    send.publish(header(128, sent + 1));
    while !send.flushed().unwrap() || recv.ready().unwrap() {
        if recv.ready().unwrap() {
            take(&mut recv);
        }
    }
    assert_eq!(seen, sent + 2);
}

#[test]
fn messages_of_several_sockets_arrive_in_order() {
    let (mut first, one) = UnixStream::pair().unwrap();
    let (mut second, two) = UnixStream::pair().unwrap();
    let (_send, mut recv, pump) = side(vec![one, two]);
    second.write_all(&frame(1, 0)).unwrap();
    second.write_all(&frame(3, 0)).unwrap();
    pump.progress();
    assert!(!recv.ready().unwrap());
    first.write_all(&frame(0, 0)).unwrap();
    assert!(recv.ready().unwrap());
    recv.release();
    assert!(recv.ready().unwrap());
    recv.release();
    assert!(!recv.ready().unwrap());
    first.write_all(&frame(2, 0)).unwrap();
    assert!(recv.ready().unwrap());
}

#[test]
fn impossible_frame_is_an_error_that_names_the_peer() {
    let mut wrong_magic = frame(0, 1);
    wrong_magic[44] ^= 1;
    for (bad, part) in [
        (wrong_magic, "magic"),
        (frame(1, 1), "message 1 (expected 0)"),
        (frame(0, 129), "129 bytes (a slot has 128)"),
        (frame(0, u32::MAX), "4294967295 bytes"),
    ] {
        let (mut there, here) = UnixStream::pair().unwrap();
        let (mut send, mut recv, _pump) = side(vec![here]);
        there.write_all(&bad).unwrap();
        let error = recv.ready().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        assert!(error.message().contains(part), "{error}");
        assert!(error.message().contains("rank 1 (host there"), "{error}");
        assert!(recv.ready().is_err() && send.ready().is_err());
    }
}

#[test]
fn end_of_stream_is_an_error_after_the_data() {
    for cut in [0, 1, 64, 100] {
        let (mut there, here) = UnixStream::pair().unwrap();
        let (mut send, mut recv, pump) = side(vec![here]);
        there.write_all(&frame(0, 3)).unwrap();
        there.write_all(b"abc").unwrap();
        let mut rest = frame(1, 100).to_vec();
        rest.extend([7; 100]);
        there.write_all(&rest[..cut]).unwrap();
        drop(there);
        // The broken connection must not fail `progress`, because the rank may expect nothing from
        // that peer.
        pump.progress();
        assert!(recv.ready().unwrap());
        assert_eq!(recv.payload(), b"abc");
        recv.release();
        let error = recv.ready().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Remote);
        assert!(error.message().contains("rank 1") && error.message().contains("closed"));
        assert!(send.ready().is_err());
        assert!(send.flushed().unwrap(), "nothing was left to send");
    }
}

#[test]
fn full_socket_keeps_messages_until_the_peer_reads() {
    let (there, here) = UnixStream::pair().unwrap();
    let (mut send, _recv, pump) = side(vec![here]);
    let (_other, mut recv, _pump) = side(vec![there]);
    let header = |number: u64| Header {
        bytes: 128,
        signature: [number; 5],
        crc: 0,
    };
    let mut sent = 0;
    while send.ready().unwrap() {
        send.slot().fill(sent as u8);
        send.publish(header(sent));
        sent += 1;
        assert!(sent < 1_000_000, "no backpressure");
    }
    assert!(!send.flushed().unwrap());
    let mut interests = Vec::new();
    pump.lock().interests(&mut interests).unwrap();
    assert_eq!(interests[0].events, libc::POLLIN | libc::POLLOUT);
    let mut seen = 0;
    while seen < sent {
        if recv.ready().unwrap() {
            assert_eq!(recv.header(), header(seen));
            assert!(recv.payload().iter().all(|&byte| byte == seen as u8));
            recv.release();
            seen += 1;
        } else {
            send.flushed().unwrap();
        }
    }
    assert!(send.flushed().unwrap() && !recv.ready().unwrap());
}
