-- Tasks of tickets in flight. args: ids. Returns for each id its epoch and its position in the epoch, -1 and -1 for a ticket
-- that is not in flight.
local found = {}
for i, id in ipairs(args.ids) do
  local known = redis.call('HMGET', key('about:' .. id), 'state', 'epoch', 'position')
  local in_flight = known[1] == 'issued'
  found[2 * i - 1] = in_flight and tonumber(known[2]) or -1
  found[2 * i] = in_flight and tonumber(known[3]) or -1
end
return found
