-- issued -> filtered(reason). args: id, reason, facts (of the group, see ledger.py), ignored_failures (failures of the group to
-- ignore).
-- Returns 'filtered', 'again' (ignored), 'duplicate', 'void' or 'finished'.
local id = args.id
if state_of(id) ~= 'issued' then return late_outcome(id) end
if redis.call('HINCRBY', key('about:' .. id), 'failures', 1) <= args.ignored_failures then return 'again' end
release_ticket(id)
drop(id, 'filtered', args.reason)
record_facts(args.facts)
return 'filtered'
