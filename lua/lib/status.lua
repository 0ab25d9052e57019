-- lib/status.lua: what a script replies: {status, value, flags, message, last}; or the short
-- form, if no flag is set, and the caller has no score or nobody waits.
--
--   status              value                             short form
local GRANTED    = 1 -- the fencing token, 0 for a reader    the token, 1 for a reader
local WAITING    = 2 -- ms until the lease in front ends     -1 - ms
local BUSY       = 3 -- the id in the way, a holder or the first waiter: a try is refused
local RELEASED   = 4 -- 0                                    the message, 1 if there is none
local GONE       = 5 -- 0: neither holder nor waiter
local TOMBSTONED = 6 -- 0: a tombstone refuses this id, or tells why it is gone
local FOREIGN    = 7 -- "<type>:<key>" of a key that holds foreign data: another type, a value
--                      without a TTL, or a token that is no counter of ours. It is left as it is.
local DONE       = 1 -- the short form of GRANTED to a reader, and of RELEASED

-- The flags, added up.
local MORE        = 1 -- more is left to hand on: call again
local UNPUBLISHED = 2 -- PUBLISH was refused: those granted have not been told
local PRECEDED    = 4 -- somebody waits whose score is before the caller's (quorum only)

-- The message grants to waiters of the caller's own mailbox: see lib/message.lua.
-- The last is the highest score that waits, 0 if nobody does (quorum only).
