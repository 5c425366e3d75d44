-- issued -> filtered(reason). args: id, reason, facts (of the group, see ledger.py), origin (of the group, as there),
-- ignored_failures (failures of the group to ignore).
-- Returns 'filtered', 'again' (ignored), 'duplicate', 'void' or 'finished'.
local id, origin = args.id, args.origin
if state_of(id) ~= 'issued' then return settle_late(late_outcome(id), id, origin) end
if redis.call('HINCRBY', key('about:' .. id), 'failures', 1) <= args.ignored_failures then return 'again' end
release_ticket(id)
drop(id, 'filtered', args.reason)
record_facts(args.facts)
settle(id, origin, args.facts.lost, 0)
return 'filtered'
