//! Who may stay connected over TCP. Whoever has said who he is may stay; all others have a share of the places that others cannot take
//! them from, and leave it after a while, or when more come: nobody who knows no token keeps those out who do. And nobody who knows one
//! has more than a share either.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// How many connections of an address (of a `/64` of IPv6) may be those of strangers. The oldest of them leaves when one more comes.
const OF_ADDRESS_MAX: usize = 64;
/// The same of all addresses: half of all places.
const STRANGERS_MAX: usize = 512;
/// How many connections may be one and the same known one's. The oldest of them leaves when one more comes.
const OF_IDENTITY_MAX: usize = 128;
/// How long a stranger may stay: longer than the head of a request may take, so that who is slow is told that he is.
const STRANGER_STAYS: Duration = Duration::from_secs(40);

/// Whom a share of the places is for: an address, or of IPv6 the network that one customer has.
pub(super) fn origin(address: IpAddr) -> String {
    match address {
        IpAddr::V6(address) => match address.to_ipv4_mapped() {
            Some(address) => address.to_string(),
            None => format!("{}/64", Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
        },
        address @ IpAddr::V4(_) => address.to_string(),
    }
}

/// Who is there.
#[derive(Debug, Default)]
pub(super) struct Places {
    strangers: Mutex<Strangers>,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Strangers {
    next: u64,
    by_age: BTreeMap<u64, (String, watch::Sender<Leave>)>,
}

/// Connections of those who have said who they are, by that and by when they came.
#[derive(Debug, Default)]
struct Known {
    by_name: BTreeMap<String, BTreeMap<u64, watch::Sender<Leave>>>,
    /// As whom somebody was last known over a connection.
    names: BTreeMap<u64, String>,
}

impl Known {
    /// This connection is his now, or still. Who of his leaves for it.
    fn enter(
        &mut self,
        number: u64,
        name: &str,
        leave: &watch::Sender<Leave>,
    ) -> Option<watch::Sender<Leave>> {
        if self.names.get(&number).is_some_and(|before| before == name) {
            return None;
        }
        self.leave(number);
        self.names.insert(number, name.to_owned());
        let his = self.by_name.entry(name.to_owned()).or_default();
        his.insert(number, leave.clone());
        let oldest = his.keys().find(|it| **it != number).copied().filter(|_| his.len() > OF_IDENTITY_MAX)?;
        let leaves = his.remove(&oldest);
        self.names.remove(&oldest);
        leaves
    }

    fn leave(&mut self, number: u64) {
        let Some(name) = self.names.remove(&number) else { return };
        if let Some(his) = self.by_name.get_mut(&name) {
            his.remove(&number);
            if his.is_empty() {
                self.by_name.remove(&name);
            }
        }
    }
}

/// When a connection has to end; never if somebody is at the other end who is known.
type Leave = Option<Instant>;

/// The place of one connection, from when it is accepted until it ends.
#[derive(Debug)]
pub(super) struct Place {
    places: Arc<Places>,
    number: u64,
    leave: watch::Sender<Leave>,
}

impl Places {
    /// One more connection, of a stranger so far.
    pub(super) fn take(self: &Arc<Self>, address: IpAddr) -> Arc<Place> {
        let (leave, _) = watch::channel(Some(Instant::now() + STRANGER_STAYS));
        let origin = origin(address);
        let mut strangers = self.strangers();
        let of_address = strangers.by_age.iter().filter(|(_, (other, _))| *other == origin);
        let of_address: Vec<u64> = of_address.map(|(number, _)| *number).collect();
        let leaves = if of_address.len() >= OF_ADDRESS_MAX {
            of_address.first().copied()
        } else if strangers.by_age.len() >= STRANGERS_MAX {
            strangers.by_age.keys().next().copied()
        } else {
            None
        };
        if let Some((_, leave)) = leaves.and_then(|number| strangers.by_age.remove(&number)) {
            leave.send_replace(Some(Instant::now()));
        }
        let number = strangers.next;
        strangers.next += 1;
        strangers.by_age.insert(number, (origin, leave.clone()));
        Arc::new(Place { places: Arc::clone(self), number, leave })
    }

    fn strangers(&self) -> MutexGuard<'_, Strangers> {
        self.strangers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// Somebody is there who may ask for what is not for everybody, and who that is, where that is asked for.
    pub(super) fn is_known(&self, name: Option<&str>) {
        // Whoever has been told to leave does.
        if self.places.strangers().by_age.remove(&self.number).is_some() || self.is_on_notice() {
            self.leave.send_replace(None);
        }
        let stays = self.leave.borrow().is_none();
        let leaves =
            name.filter(|_| stays).and_then(|name| self.places.known().enter(self.number, name, &self.leave));
        if let Some(leave) = leaves {
            leave.send_replace(Some(Instant::now()));
        }
    }

    /// He is nobody any more, and leaves in a while unless he says who he is.
    pub(super) fn is_unknown(&self) {
        self.leave.send_if_modified(|leave| {
            let was_known = leave.is_none();
            leave.get_or_insert_with(|| Instant::now() + STRANGER_STAYS);
            was_known
        });
    }

    /// Who was known before has some time left.
    fn is_on_notice(&self) -> bool {
        self.leave.borrow().is_some_and(|at| at > Instant::now())
    }

    /// Ends when the connection has to.
    pub(super) async fn has_to_end(&self) {
        let mut leave = self.leave.subscribe();
        loop {
            let at = *leave.borrow_and_update();
            let over = async {
                match at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = over => return,
                // It cannot be closed: we have a sender.
                _ = leave.changed() => {}
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.strangers().by_age.remove(&self.number);
        self.places.known().leave(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn has_to_end(place: &Place) -> bool {
        // What is due is due at once: time stands still otherwise.
        tokio::time::timeout(Duration::from_millis(1), place.has_to_end()).await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_stranger_of_an_address_makes_room_and_the_known_stay() {
        let places = Arc::new(Places::default());
        let address = |last: u8| IpAddr::from([10, 0, 0, last]);
        let known = places.take(address(1));
        known.is_known(None);
        let mine: Vec<_> = (0..=OF_ADDRESS_MAX).map(|_| places.take(address(1))).collect();
        assert!(has_to_end(&mine[0]).await && !has_to_end(&mine[1]).await);
        mine[0].is_known(None);
        assert!(has_to_end(&mine[0]).await, "it is too late");
        let others: Vec<_> = (0..STRANGERS_MAX)
            .map(|number| places.take(address(u8::try_from(2 + number / OF_ADDRESS_MAX).expect("few"))))
            .collect();
        assert!(has_to_end(&mine[OF_ADDRESS_MAX]).await && !has_to_end(&others[0]).await);
        assert!(!has_to_end(&known).await);
        drop((mine, others));
        assert!(places.strangers().by_age.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_stranger_leaves_after_a_while_and_so_does_who_is_not_known_any_more() {
        let places = Arc::new(Places::default());
        let (stranger, known) = (places.take([10, 0, 0, 1].into()), places.take([10, 0, 0, 2].into()));
        known.is_known(None);
        stranger.is_unknown();
        tokio::time::advance(STRANGER_STAYS).await;
        assert!(has_to_end(&stranger).await && !has_to_end(&known).await);
        known.is_unknown();
        tokio::time::advance(STRANGER_STAYS / 2).await;
        known.is_unknown();
        assert!(!has_to_end(&known).await);
        known.is_known(None);
        tokio::time::advance(STRANGER_STAYS).await;
        assert!(!has_to_end(&known).await, "he has said who he is");
        known.is_unknown();
        tokio::time::advance(STRANGER_STAYS).await;
        assert!(has_to_end(&known).await);
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_who_is_known_has_all_places() {
        let places = Arc::new(Places::default());
        let enter = |name| {
            let place = places.take([10, 0, 0, 1].into());
            place.is_known(Some(name));
            place
        };
        let other = enter("bob");
        let mine: Vec<_> = (0..OF_IDENTITY_MAX).map(|_| enter("alice")).collect();
        mine[0].is_known(Some("alice"));
        assert!(!has_to_end(&mine[0]).await, "he has no more than he may");
        let one_more = enter("alice");
        assert!(has_to_end(&mine[0]).await && !has_to_end(&mine[1]).await);
        assert!(!has_to_end(&one_more).await && !has_to_end(&other).await);
        mine[0].is_known(Some("alice"));
        assert!(has_to_end(&mine[0]).await && !has_to_end(&mine[1]).await, "who was told to leave does");
        // Whoever turns out to be another one counts for that one.
        mine[1].is_known(Some("bob"));
        let again = enter("alice");
        assert!(!has_to_end(&mine[2]).await);
        drop((mine, one_more, other, again));
        let known = places.known();
        assert!(known.by_name.is_empty() && known.names.is_empty());
    }

    #[test]
    fn addresses_of_one_network_are_one_origin() {
        let of = |address: &str| origin(address.parse().expect("an address"));
        assert_eq!(of("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::/64");
        assert_eq!(of("2001:db8:1:2::9"), of("2001:db8:1:2:ffff::"));
        assert_eq!(of("192.0.2.1"), "192.0.2.1");
        assert_eq!(of("::ffff:192.0.2.1"), "192.0.2.1");
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
    }
}
