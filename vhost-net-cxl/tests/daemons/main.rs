//! The engine's daemons as they are deployed, with everything around them real: pool file, control channels, worker
//! threads, doorbells, vhost-user sockets, TAP devices on a bridge. The test plays the controller and the VMM.

mod cable;
mod letting_go;
mod pod;
mod queue_pairs;
