//! What a guest is shown of the discards that its disk heeds.

use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;

use vhost::vhost_user::VhostUserFrontend;
use vhost_blk_cxl::message::Operation;

use crate::pod::ram::pod;
use crate::pod::*;
use crate::requests::grow;

/// What its configuration space says, in bytes.
fn discard_granularity(driver: &mut Driver) -> u32 {
    let config = driver.guest.config(60);
    u32::from_le_bytes(config[44..48].try_into().unwrap()) * SECTOR as u32
}

#[test]
fn a_guest_is_shown_what_discards_its_disk_heeds() {
    let (mut pod, control) = pod(23);
    assert_eq!(discard_granularity(&mut Driver::connected(&pod)), 4096, "what fits most");
    for (said, shown) in [
        (Some(64 << 10), 64 << 10),
        (Some(512), 512),
        (Some(1 << 30), 1 << 30),
        (Some(256), 512),
        // None of it makes sense.
        (Some(1000), 4096),
        (Some(u32::MAX), 4096),
        (Some(0), 512),
    ] {
        pod.disk.discard_granularity_bytes = said;
        pod.apply_disk();
        assert_eq!(discard_granularity(&mut Driver::connected(&pod)), shown, "{said:?}");
    }
    drop(control);
}

/// It moves to another SSD.
#[test]
fn what_a_disk_heeds_may_change_under_its_guest() {
    let (mut pod, control) = pod(29);
    pod.disk.discard_granularity_bytes = Some(4096);
    pod.apply_disk();
    let mut driver = Driver::connected(&pod);
    let (heard, given) = UnixStream::pair().unwrap();
    driver.guest.frontend().set_backend_request_fd(&given).unwrap();
    driver.guest.set_config(32, &[0]);
    assert_eq!(discard_granularity(&mut driver), 4096);
    pod.disk.discard_granularity_bytes = Some(64 << 10);
    pod.apply_disk();
    // Its driver has no use for the news, and goes on as it began.
    heard.set_nonblocking(true).unwrap();
    let told = (&heard).read(&mut [0; 12]).map_err(|error| error.kind());
    assert_eq!(told, Err(ErrorKind::WouldBlock), "nobody is told");
    let before = control.log().len();
    assert_eq!(driver.range_request(T_DISCARD, 8, 8, 0), OK);
    assert!(control.log()[before..].iter().any(|it| it.operation == Operation::Discard));
    assert_eq!((discard_granularity(&mut driver), driver.guest.config(60)[32]), (64 << 10, 0));
    // Neither brings the other back.
    driver.guest.set_config(32, &[1]);
    grow(&mut pod);
    assert_eq!((discard_granularity(&mut driver), driver.guest.config(60)[32]), (64 << 10, 1));
    let sectors = u64::from_le_bytes(driver.guest.config(60)[..8].try_into().unwrap());
    assert_eq!(sectors, VOLUME_BYTES / SECTOR + 2048);
}
