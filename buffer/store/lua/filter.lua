-- issued -> filtered(reason). args: id, reason, facts (of the group, see ledger.py), patience (how many times this may
-- happen to the group before it counts). Returns 'filtered', 'again' (patience is left), 'duplicate', 'void' or 'finished'.
local id = args.id
if state_of(id) ~= 'issued' then return too_late(id) end
if redis.call('HINCRBY', key('about:' .. id), 'failures', 1) <= args.patience then return 'again' end
land(id)
drop(id, 'filtered', args.reason)
account(args.facts)
return 'filtered'
