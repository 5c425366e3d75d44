-- issued -> reissued, of a ticket that came to nothing. args: id, origin, lost (tokens by reason; ledger.py).
-- Returns 'reissued', 'duplicate', 'void' or 'finished'.
local id, origin = args.id, args.origin
if state_of(id) ~= 'issued' then return settle_late(late_outcome(id), id, origin) end
release_ticket(id)
reissue(id, 'came to nothing')
settle(id, origin, args.lost, 0)
return 'reissued'
